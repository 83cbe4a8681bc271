"""Path B: PTX, as nvcc or Triton wrote it, translated to C++ on the same runtime."""
