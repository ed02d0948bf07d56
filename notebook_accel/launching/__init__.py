"""Starting ranks and looking after them. Never imports torch.

What stands here runs in the kernel, or belongs to both sides; the folders are what runs elsewhere, or is done before.
"""
