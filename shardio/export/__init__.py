"""Takes datasets out again: as WebDataset's tars, as Parquet, as arrays or as folders of files.

`reading` gives verified samples, one module for each format writes them, `driver` puts both
together and lets the result appear when all of it is on the disk.
"""

from shardio.export.api import ExportProgress, ExportReport, export
from shardio.export.formats import Skipped

__all__ = ["ExportProgress", "ExportReport", "Skipped", "export"]
