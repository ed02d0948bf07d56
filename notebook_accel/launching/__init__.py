"""Starting and supervising ranks. The kernel's and the agent's modules never import torch.

Each folder is a process, or what two processes share. The modules beside them serve several processes.
"""
