"""A CUDA device on a host without one, so that the trainer's real CUDA branches run in CI.

`pretend` (conftest.py) runs a function in processes where torch.cuda.is_available() is true. Tensors of "cuda" hold
their numbers on the host (device.py), so results equal the CPU's; mixing devices and .numpy() raise as on a real one,
and what a real device would make the host wait for is counted with its line (record.py). NCCL is gloo underneath, noted
call by call (collectives.py); streams and events order nothing and are noted (streams.py); IPC handles are shared
memory (ipc.py).

It cannot show: kernels and their numerics, races between streams, NCCL's own behaviour, transformer-engine, the
fragmentation of device memory.
"""
