"""One step of training on a GPU: products in bfloat16, everything between them in kernels, nothing by autograd.

The tables stay float32. What has the size of the entities, the tables' own gradient and their update, is done in one
pass each; what has the size of the batch, in two kernels around the products. Nothing asks the host, so that the
whole step can be captured.
"""
