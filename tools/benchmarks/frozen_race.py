"""A race between data loaders on the same work, on the same machine, in one run.

    python frozen_race.py prepare                    make the common data (once); a peer makes its own files at its first run
    python frozen_race.py run PEER WORK [WORKERS]    one peer on one work, one JSON line

`tools/bench race.frames` and the like run every peer on a work, in turns.

WORK    frames   2,048 samples of 224x224x3 uint8 and a label, shuffled, batches of 64
        tokens   262,144 samples of 1,024 uint16, shuffled, batches of 256
        tokens400   the same, and shardio's dataset is cut into about 400 shards
        augment  the frames, each sample through augment() below: a random crop and flip to 192x192, keyed or not
        jpeg     2,048 JPEG images (quality 90) decoded to 224x224x3, shuffled, batches of 64
PEER    limit    the ceiling: forked workers gather rows of a memory-mapped .npy into preallocated shared
                 blocks, 16-byte messages over pipes, no format, no checks (jpeg: turbojpeg straight into blocks)
        memmap   one process, one gather from a memory-mapped .npy into the destination
        torchdl ffcv spdl grain mds wds tinyloader      as their own documentation shows them
        shardio  the project, installed in the interpreter that runs this

The consumer copies every batch into one reused buffer: that is what an upload to a device does, and no peer
is paid for handing out memory that nobody reads. Three epochs; the best of the last two counts, and the first, in
which pages are mapped and shardio checks every hash, is shown beside it.
So is the rate of one stream of up to 20 more epochs, which batches prepared between epochs do not flatter.
Every epoch must deliver every sample exactly once: `exact` says so, and a peer that fails it has no score.

Data lives under $RACE_DATA (default: ./race-data). FFCV needs numpy<2 and system libraries (libopencv-dev,
libturbojpeg0-dev): give its interpreter in $RACE_PYTHON_FFCV. Other peers: pip install torch webdataset
mosaicml-streaming grain array_record spdl spdl-io tinyloader simplejpeg.
"""
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

import numpy as np

DATA = pathlib.Path(os.environ.get("RACE_DATA", "race-data")).absolute()
EPOCHS = 3
STREAM_EPOCHS, STREAM_S = 20, 20
BATCH = {"frames": 64, "tokens": 256, "tokens400": 256, "augment": 64, "jpeg": 64}
SHAPE = {"frames": (224, 224, 3), "tokens": (1024,), "tokens400": (1024,), "augment": (192, 192, 3), "jpeg": (224, 224, 3)}
DTYPE = {"frames": np.uint8, "tokens": np.uint16, "tokens400": np.uint16, "augment": np.uint8, "jpeg": np.uint8}
COUNT = {"frames": 2048, "tokens": 262144, "tokens400": 262144, "augment": 2048, "jpeg": 2048}
ROWS = {"tokens400": "tokens", "augment": "frames"}          # works that read another work's data
PEERS = ["limit", "memmap", "shardio", "ffcv", "torchdl", "spdl", "grain", "mds", "wds", "tinyloader"]
ONLY = {"tokens": {"limit", "memmap", "shardio", "ffcv", "torchdl", "mds"}, "tokens400": {"limit", "shardio"},
        "augment": {"shardio", "torchdl", "spdl"}, "jpeg": {"limit", "memmap", "shardio", "ffcv", "torchdl", "spdl", "grain", "tinyloader"}}


def make_common():
    if (DATA / "done").exists():
        return
    DATA.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (64, 28, 28, 3), dtype=np.uint8)
    frames = np.empty((COUNT["frames"], *SHAPE["frames"]), np.uint8)
    for i in range(len(frames)):
        frames[i] = coarse[i % 64].repeat(8, 0).repeat(8, 1) // 2 + rng.integers(0, 16, SHAPE["frames"], dtype=np.uint8)
        frames[i, 0, 0, :2] = i & 255, i >> 8
    np.save(DATA / "frames.npy", frames)
    tokens = rng.integers(0, 50000, (COUNT["tokens"], 1024), dtype=np.uint16)
    ids = np.arange(len(tokens))
    tokens[:, 0], tokens[:, 1] = ids & 0xFFFF, ids >> 16
    np.save(DATA / "tokens.npy", tokens)
    (DATA / "done").touch()


def array(work):
    return np.load(DATA / f"{ROWS.get(work, work)}.npy", mmap_mode="r")


def make_jpegs():
    if (DATA / "jpeg" / "done").exists():
        return
    import simplejpeg
    (DATA / "jpeg").mkdir(exist_ok=True)
    for i, frame in enumerate(array("frames")):
        (DATA / "jpeg" / f"{i:06d}.jpg").write_bytes(simplejpeg.encode_jpeg(np.array(frame), quality=90))
    (DATA / "jpeg" / "done").touch()


def augment(frame, rng):
    """A random crop to 192x192 and a flip; the id in the first pixel is carried along."""
    y, x, flip = rng.integers(0, 33), rng.integers(0, 33), rng.integers(0, 2)
    crop = frame[y:y + 192, x:x + 192]
    out = np.ascontiguousarray(crop[:, ::-1] if flip else crop)
    out[0, 0, :2] = frame[0, 0, :2]
    return out


def augment_sample(sample, rng):
    """The same, as shardio's transform."""
    return {"x": augment(sample["x"], rng)}


def jpegs():
    return [str(DATA / "jpeg" / f"{i:06d}.jpg") for i in range(COUNT["jpeg"])]


def sample_ids(work, batch):
    if work.startswith("tokens"):
        return batch[:, 0].astype(np.int64) + (batch[:, 1].astype(np.int64) << 16)
    return batch[:, 0, 0, 0].astype(np.int64) + (batch[:, 0, 0, 1].astype(np.int64) << 8)


class Samples:
    """What a user of a map-style loader writes."""
    def __init__(self, work):
        self.work, self.rows = work, None

    def __len__(self):
        return COUNT[self.work]

    def __getitem__(self, i):
        if self.rows is None:
            self.rows = jpegs() if self.work == "jpeg" else array(self.work)
        if self.work == "jpeg":
            import simplejpeg
            return simplejpeg.decode_jpeg(pathlib.Path(self.rows[i]).read_bytes())
        if self.work == "augment":
            return augment(self.rows[i], np.random.default_rng(i))
        return np.array(self.rows[i])


def stack(samples):
    return np.stack(samples)


def limit(work, workers):
    import mmap
    n, b = COUNT[work], BATCH[work]
    bytes_per_batch = int(np.prod(SHAPE[work])) * np.dtype(DTYPE[work]).itemsize * b
    blocks = 2 * workers
    fd = os.memfd_create("race")
    os.ftruncate(fd, blocks * bytes_per_batch)
    view = np.frombuffer(mmap.mmap(fd, blocks * bytes_per_batch), DTYPE[work]).reshape(blocks, b, *SHAPE[work])
    view[:] = 0
    message = struct.Struct("<IIII")
    todo, done = [os.pipe() for _ in range(workers)], os.pipe()

    def order(epoch):
        return np.random.default_rng(epoch).permutation(n)

    def worker(w):
        current, perm = -1, None
        rows = None if work == "jpeg" else array(work)
        files = jpegs() if work == "jpeg" else None
        while len(m := os.read(todo[w][0], message.size)) == message.size:
            epoch, k, block, _ = message.unpack(m)
            if epoch != current:
                current, perm = epoch, order(epoch)
            if work == "jpeg":
                import simplejpeg
                for j, i in enumerate(perm[k * b:(k + 1) * b]):
                    simplejpeg.decode_jpeg(pathlib.Path(files[i]).read_bytes(), buffer=view[block, j])
            else:
                np.take(rows, perm[k * b:(k + 1) * b], axis=0, out=view[block], mode="clip")
            os.write(done[1], m)
        os._exit(0)

    pids = []
    for w in range(workers):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            worker(w)
        pids.append(pid)

    def epoch(e):
        free, sent, ready = list(range(blocks)), 0, {}
        for k in range(n // b):
            while free and sent < n // b:
                os.write(todo[sent % workers][1], message.pack(e, sent, free.pop(), 0))
                sent += 1
            while k not in ready:
                _, got, block, _ = message.unpack(os.read(done[0], message.size))
                ready[got] = block
            block = ready.pop(k)
            yield view[block]
            free.append(block)
    epoch.close = lambda: [os.kill(p, signal.SIGKILL) for p in pids]
    return epoch


def memmap(work, workers):
    out = np.empty((BATCH[work], *SHAPE[work]), DTYPE[work])
    b = BATCH[work]

    def epoch(e):
        perm = np.random.default_rng(e).permutation(COUNT[work])
        if work == "jpeg":
            import simplejpeg
            files = jpegs()
        else:
            rows = array(work)
        for i in range(0, len(perm), b):
            if work == "jpeg":
                for j, k in enumerate(perm[i:i + b]):
                    simplejpeg.decode_jpeg(pathlib.Path(files[k]).read_bytes(), buffer=out[j])
            else:
                np.take(rows, perm[i:i + b], axis=0, out=out, mode="clip")
            yield out
    return epoch


def torchdl(work, workers):
    from torch.utils.data import DataLoader
    loader = DataLoader(Samples(work), batch_size=BATCH[work], shuffle=True, num_workers=workers, persistent_workers=True)
    return lambda e: (batch.numpy() for batch in loader)


def tinyloader(work, workers):
    import tinyloader.loader as tl

    class Batches(tl.Loader):
        def __init__(self):
            self.samples = Samples(work)

        def make_request(self, item):
            return item

        def load(self, request):
            return (np.stack([self.samples[int(i)] for i in request]),)

        def post_process(self, response):
            return response

    globals()["Batches"] = Batches
    Batches.__qualname__ = "Batches"

    def epoch(e):
        perm = np.random.default_rng(e).permutation(COUNT[work])
        items = [perm[i:i + BATCH[work]] for i in range(0, len(perm), BATCH[work])]
        with tl.load_with_workers(Batches(), items, workers, shared_memory_enabled=True, memory_pool_block_count=2 * workers) as got:
            for (batch,) in got:
                yield batch
    return epoch


def spdl(work, workers):
    from spdl.dataloader import DataLoader
    samples = Samples(work)

    def epoch(e):
        perm = np.random.default_rng(e).permutation(COUNT[work]).tolist()
        yield from DataLoader(perm, preprocessor=samples.__getitem__, batch_size=BATCH[work], aggregator=np.stack, num_threads=workers)
    return epoch


def grain(work, workers):
    import grain.python as g
    if work == "jpeg":
        source, operations = Samples(work), []
    else:
        path = DATA / f"{work}.arrayrecord"
        if not path.exists():
            from array_record.python.array_record_module import ArrayRecordWriter
            writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
            for row in array(work):
                writer.write(row.tobytes())
            writer.close()
        source = g.ArrayRecordDataSource(str(path))

        class Parse(g.MapTransform):
            def map(self, record):
                return np.frombuffer(record, DTYPE[work]).reshape(SHAPE[work])
        operations = [Parse()]

    def epoch(e):
        sampler = g.IndexSampler(COUNT[work], num_epochs=1, shard_options=g.NoSharding(), shuffle=True, seed=e)
        yield from g.DataLoader(data_source=source, sampler=sampler, operations=[*operations, g.Batch(BATCH[work])], worker_count=workers)
    return epoch


def mds(work, workers):
    import streaming
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader
    path = DATA / f"mds-{work}"
    if not path.exists():
        shape = ",".join(map(str, SHAPE[work]))
        with MDSWriter(out=str(path), columns={"x": f"ndarray:{np.dtype(DTYPE[work]).name}:{shape}"}) as writer:
            for row in array(work):
                writer.write({"x": np.array(row)})
    streaming.base.util.clean_stale_shared_memory()
    data = StreamingDataset(local=str(path), shuffle=True, batch_size=BATCH[work])
    loader = DataLoader(data, batch_size=BATCH[work], num_workers=workers, persistent_workers=True,
                        collate_fn=lambda batch: np.stack([s["x"] for s in batch]))
    return lambda e: iter(loader)


def wds(work, workers):
    import webdataset as w
    if not list(DATA.glob("wds-*.tar")):
        with w.ShardWriter(str(DATA / "wds-%04d.tar"), maxsize=64 << 20, verbose=0) as writer:
            for i, row in enumerate(array(work)):
                writer.write({"__key__": f"{i:06d}", "x.npy": np.array(row)})
    data = w.WebDataset(sorted(map(str, DATA.glob("wds-*.tar"))), shardshuffle=100).shuffle(500).decode().to_tuple("x.npy")
    loader = w.WebLoader(data.batched(BATCH[work], collation_fn=lambda b: np.stack([x[0] for x in b])), batch_size=None, num_workers=workers)
    return lambda e: iter(loader)


def ffcv(work, workers):
    from ffcv.fields import NDArrayField, RGBImageField
    from ffcv.fields.decoders import NDArrayDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter
    path = DATA / f"{work}.beton"
    rows = array("frames" if work == "jpeg" else work)
    kind = np.int16 if work == "tokens" else rows.dtype

    class Rows:
        def __len__(self):
            return len(rows)

        def __getitem__(self, i):
            return (np.array(rows[i]).view(kind),)
    if not path.exists():
        field = RGBImageField(write_mode="jpg", jpeg_quality=90) if work == "jpeg" else NDArrayField(np.dtype(kind), SHAPE[work])
        DatasetWriter(str(path), {"x": field}, num_workers=2).from_indexed_dataset(Rows())
    decoder = SimpleRGBImageDecoder() if work == "jpeg" else NDArrayDecoder()
    loader = Loader(str(path), batch_size=BATCH[work], num_workers=workers, order=OrderOption.RANDOM, os_cache=True, pipelines={"x": [decoder]})
    return lambda e: (np.asarray(x).view(DTYPE[work]) for (x,) in loader)


def shardio_data(work):
    import shardio as s
    path = DATA / f"shardio-{ROWS.get(work, work) if work != 'tokens400' else work}"
    if not (path / "dataset.json").exists():
        field = s.Image() if work == "jpeg" else s.Array(array(work).dtype.name, array(work).shape[1:])
        n_bytes = array(work).nbytes // 400 if work == "tokens400" else 256 << 20
        with s.DatasetWriter(path, s.Schema({"x": field}), shard_bytes=n_bytes) as writer:
            for row in (jpegs() if work == "jpeg" else array(work)):
                writer.append({"x": pathlib.Path(row).read_bytes() if work == "jpeg" else row})
    return path


def shardio(work, workers):
    """The project through its public interface alone; `verify` stays at its default."""
    import shardio as s
    loader = s.ShardLoader(shardio_data(work), batch_size=BATCH[work], shuffle=True, num_workers=workers, output="numpy",
                           transform=augment_sample if work == "augment" else None)

    def epoch(e):
        for batch in loader:
            yield batch["x"]
    epoch.close = loader.close
    return epoch


def peak_rss_mb():
    """This process's own peak since exec (ru_maxrss would carry the parent's over)."""
    line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def run(peer, work, workers):
    make_common()
    if work == "jpeg":
        make_jpegs()
    if peer == "shardio":
        shardio_data(work)
    start = time.perf_counter()
    epoch = globals()[peer](work, workers)
    built = time.perf_counter() - start
    out = np.empty((BATCH[work], *SHAPE[work]), DTYPE[work])
    rates, firsts, exact = [], [], True
    for e in range(EPOCHS):
        start, n, ids, first = time.perf_counter(), 0, [], None
        for batch in epoch(e):
            first = first or time.perf_counter() - start
            batch = np.asarray(batch)
            out[:len(batch)] = batch
            n += len(batch)
            ids.append(sample_ids(work, out[:len(batch)]))
        rates.append(n / (time.perf_counter() - start))
        firsts.append(first)
        # JPEG is lossy: its pixels carry no exact id
        exact = exact and n == COUNT[work] and (work == "jpeg" or len(np.unique(np.concatenate(ids))) == n)
    best = max(rates[1:])
    start, n = time.perf_counter(), 0
    for e in range(EPOCHS, EPOCHS + STREAM_EPOCHS):
        for batch in epoch(e):
            out[:len(batch)] = batch
            n += len(batch)
        if time.perf_counter() - start > STREAM_S:
            break
    stream = n / (time.perf_counter() - start)
    print(json.dumps({
        "peer": peer, "work": work, "workers": workers, "exact": bool(exact), "samples_per_s": round(best),
        "GB_per_s": round(best * out[0].nbytes / 1e9, 2), "cold_samples_per_s": round(rates[0]), "stream_samples_per_s": round(stream),
        "build_s": round(built, 3), "first_batch_s": [round(f, 4) for f in firsts],
        "main_rss_MB": peak_rss_mb()}), flush=True)
    getattr(epoch, "close", lambda: None)()
    os._exit(0)


if __name__ == "__main__":
    command, *rest = sys.argv[1:] or ["help"]
    if command == "prepare":
        make_common()
    elif command == "run":
        run(rest[0], rest[1], int(rest[2]) if len(rest) > 2 else 2)
    else:
        print(__doc__)
