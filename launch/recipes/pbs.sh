#!/bin/bash
# Train on two nodes under PBS or Torque: qsub -v CONFIG=config.yaml pbs.sh
# Run: the script itself, with a PBS_NODEFILE of two hosts made of namespaces, MPICH 5.0, November 2026.
# Never run: under a PBS server.
#PBS -N dbrdist
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -r y
set -eu
cd "${PBS_O_WORKDIR:-.}"
. "${VENV:-$PWD/.venv}/bin/activate"
# Hosts and slots come from PBS_NODEFILE. PBS sends SIGTERM before the end of the walltime: the ranks save and stop.
exec dbrdist-launch ${LAUNCH_OPTIONS:-} --log-dir "runs/${PBS_JOBID:-local}" -- ${PROGRAM:-dbrdist-train --resume "$CONFIG"}
