"""The front door: the `etude` command line, the supervisor behind `etude up`, `etude doctor`, the demo."""
