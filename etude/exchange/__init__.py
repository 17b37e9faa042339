"""`etude export` and `etude import`: policies to and from Hugging Face directories, and in from GGUF files.

Where the rest is: exporting, importing, checking (a directory's tensors), card (etude.json), folder (writing a whole
directory), store (names in the object store), errors.
"""

from etude.exchange.checking import Checked, check
from etude.exchange.errors import NotExchanged
from etude.exchange.exporting import Exported, export_directory, export_run, export_stored
from etude.exchange.importing import Imported, import_checkpoint, import_to
from etude.exchange.store import STORED, stored

__all__ = [
    "STORED",
    "Checked",
    "Exported",
    "Imported",
    "NotExchanged",
    "check",
    "export_directory",
    "export_run",
    "export_stored",
    "import_checkpoint",
    "import_to",
    "stored",
]
