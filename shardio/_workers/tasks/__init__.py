"""Run functions over items in worker processes, threads and coroutines."""
