"""One package per independently deployed service. A service imports `shared` and itself, never another service."""
