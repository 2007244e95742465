"""Transport between the GPUs of one host by copy engine: each owner pushes rows into the memory of their readers."""
