"""An optional accelerator: small networks on the CPU, without torch's dispatch."""
