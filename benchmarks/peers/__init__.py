"""wholestep beside DDP, FSDP2, ZeRO, torch.compile and JAX over links of a set speed: `python -m benchmarks.peers`.

`spec` says what a peer is called and can do, `sizes` what is trained, `network` what the ranks talk over. `worker` is
one rank; `launch` starts the ranks of a peer, `turns` decides who steps when and what counts, `measure` puts these
together. `limits` and `results` are arithmetic on what was measured, `table` and `plot` show it.
"""
