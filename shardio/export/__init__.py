"""Export datasets as WebDataset tars, Parquet files or folders of files."""

from shardio.export.api import ExportProgress, ExportReport, export
from shardio.export.formats import Skipped

__all__ = ["ExportProgress", "ExportReport", "Skipped", "export"]
