"""Export datasets as WebDataset tars, Parquet files or folders of files.

| module | contents |
|---|---|
| `api` | `export`: select fields, write, publish |
| `formats` | `SampleReader`: verified batches of samples; `Exporter`: the interface of a format |
| `value_files` | a field's value as a file: encoding, suffix and safe file names |
| `webdataset`, `parquet`, `files` | the formats |
| `target` | the output folder, which appears complete or not at all |
"""

from shardio.export.api import ExportProgress, ExportReport, export
from shardio.export.formats import Skipped

__all__ = ["ExportProgress", "ExportReport", "Skipped", "export"]
