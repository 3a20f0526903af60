"""Which rank a process is, by what its starter says."""

from dbrdist_launch import identity


def test_identity_of_each_starter():
    hydra_says = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert identity.of_environment("hydra", hydra_says)[:4] == (1, 4, 1, 2)
    ompi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    ompi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"
    assert identity.of_environment("openmpi", {**hydra_says, **ompi})[:4] == (3, 4, 1, 2)  # the first are stale
    step = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert identity.of_environment("srun", {**step, "SLURM_STEP_TASKS_PER_NODE": "2,1"})[:4] == (2, 3, 0, 1)
    assert identity.of_environment("hydra", ompi) is None
