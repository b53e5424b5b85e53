"""Export datasets as WebDataset tars, Parquet files or folders of files.

| module | contents |
|---|---|
| `api` | `export`: select fields, write, publish |
| `formats` | `SampleReader`: verified batches; `Exporter`: a format's methods; values as files |
| `webdataset`, `parquet`, `files` | the formats |
"""

from shardio.export.api import ExportProgress, ExportReport, export
from shardio.export.formats import Skipped

__all__ = ["ExportProgress", "ExportReport", "Skipped", "export"]
