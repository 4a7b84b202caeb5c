"""tcgen05 of sm_100a: tensor memory and the tensor core behind it."""
