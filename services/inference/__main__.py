"""`python -m services.inference`: starts one replica. Settings: ETUDE_…, see config.py; `--check` prints them."""

import asyncio

from services.inference.config import InferenceSettings
from services.inference.service import main
from shared.settings import load

if __name__ == "__main__":
    asyncio.run(main(load(InferenceSettings)))
