"""The names of communicators that keep the whole contract on real ranks, in tests/mpi."""

# "shared" is flat with sums through shared memory for every size of array and number of ranks.
WORLDS = ("naive", "flat", "shared")
OTHERS = ("hierarchical", "two_dimensional", "non_cuda_aware", "single_node", "pure_nccl", "dummy")
