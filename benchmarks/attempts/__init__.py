"""What the death of workers costs attempts: whether long ones become rarer among those that finish.

`lengths` plays attempts in simulated time with the shipped agent, checkpoints and reconciler, with and without kills.
"""
