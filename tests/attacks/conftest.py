"""Requirements of these tests."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # products in bfloat16 die on some processors else
