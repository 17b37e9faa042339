"""`python -m services.inference`: starts one replica. Settings: ETUDE_…, see config.py; `--check` prints them."""

import asyncio

from services.inference.config import InferenceSettings
from shared.settings import load

if __name__ == "__main__":
    settings = load(InferenceSettings)  # before torch is imported: a bad setting is told at once
    from services.inference.service import main

    asyncio.run(main(settings))
