"""Starting ranks and looking after them. Runs in the kernel, in the agent and the template, never imports torch."""
