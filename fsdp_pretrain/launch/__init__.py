"""The outermost launcher: torchrun as a child, one launcher per node. No torch.

torchrun turns every exit into 1 and restarts what ended on purpose. The launcher reads why a start ended from the
record, and decides by `policy` whether to start again.
"""
