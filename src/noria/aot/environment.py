"""What libtpu reads of the environment, so before anything that imports it."""

# What it would otherwise ask the machine about, which has no TPU to tell. JAX itself stays on the CPU: where there is a
# libtpu, it would look for a TPU first.
ENVIRONMENT = (
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_ACCELERATOR_TYPE", "v6e-1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("JAX_PLATFORMS", "cpu"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # whoever only compiles needs no TPU for itself
    # Bytes. With its own default libtpu 0.0.42 crashes now and then while it compiles for SparseCores: "SIGSEGV STACK
    # OVERFLOW" in a thread of its pool of fibers.
    ("LIBTPU_INIT_ARGS", "--fibers_default_thread_stack_size=4194304"),
)
