"""Export datasets as WebDataset tars, Parquet files or folders of files.

| module | contents |
|---|---|
| `api` | `export`: selects fields, writes the samples, and renames the folder of the export |
| `formats` | `SampleReader`: reads verified samples in batches; `Exporter`: interface of a format |
| `webdataset`, `parquet`, `files` | one exporter for each format |
"""

from shardio.export.api import ExportProgress, ExportReport, export
from shardio.export.formats import Skipped

__all__ = ["ExportProgress", "ExportReport", "Skipped", "export"]
