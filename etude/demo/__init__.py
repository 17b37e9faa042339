"""`etude demo`: one command that makes problems, starts every service, practises, and reports before and after.

`prepare` makes what the run starts with, `conduct` speaks with the services through the bus as any client would,
`watch` shows what happens, `report` writes what came of it. Nothing here reaches into a service.
"""

from etude.demo.options import DemoOptions
from etude.demo.run import run

__all__ = ["DemoOptions", "run"]
