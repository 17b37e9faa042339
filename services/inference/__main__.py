"""`python -m services.inference`: starts one replica. Settings: ETUDE_…, see config.py; `--check` prints them."""

import asyncio
import sys

from services.inference.config import InferenceSettings
from shared.settings import REFUSED, BadSettings, load

if __name__ == "__main__":
    settings = load(InferenceSettings)  # before torch is imported: a bad setting is told at once
    from services.inference.service import main

    try:
        asyncio.run(main(settings))
    except BadSettings as error:  # of the checkpoint, which is looked at once all else is there
        sys.excepthook(BadSettings, error, error.__traceback__)
        raise SystemExit(REFUSED) from None
