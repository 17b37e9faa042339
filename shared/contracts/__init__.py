"""The one vocabulary of the house: what services say to each other and what they call it.

Problem, Group, Attempt, Segment, Trajectory, Verdict, Reward, PolicyVersion (a serial), StopReason: defined here once,
never by a synonym. Messages are small frozen msgspec structures (`messages`), carried on the topics of `topics`,
encoded by `codec`; bulk goes to the object store and a message carries a `Ref` (claim check). `trajectory` holds the
recorded tokens, `run` the configuration that a run is started with.
"""
