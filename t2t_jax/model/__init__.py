"""§3: what the network computes, as functions of arrays. No files, no optimiser, no device layout.

Where two forms of one computation differ in speed, JAX's default backend (cpu, gpu, tpu) chooses.
"""
