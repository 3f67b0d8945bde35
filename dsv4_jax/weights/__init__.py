"""Formats in which a device holds weight matrices. No jax: they are packed on the host, as they are loaded.

| format      | as released                                      | on the device                                     |
| `dense_fp8` | e4m3 [N, K], e8m0 scales per 128 x 128           | the same bits in tiles of 64 x 128; scales as is  |

Each gives back the released bytes (`unpack`), and `ops` has the reference of the products with it.
"""
