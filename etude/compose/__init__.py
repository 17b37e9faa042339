"""What a platform team meets with docker compose: engine, settings, ports, room, and a platform that has started by half.

Standard library alone, and every Python from 3.9 on: infra/docker/check.py runs it before anything is installed.
"""
