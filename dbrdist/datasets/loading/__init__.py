"""From examples to batches: order, iterators, worker threads and processes, conversion, transfer to a device."""
