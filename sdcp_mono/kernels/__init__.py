"""The small-row matmul: packed weights read once per pass, each output summed in one fixed order (``csrc/``).

``native`` is the shared library, ``packed`` the torch modules over it with a fallback. Nothing is loaded on import.
"""
