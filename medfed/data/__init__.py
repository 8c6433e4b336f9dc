"""Files to tensors: readers, decoding, transforms, corruption, partition, condition and the image store."""
