"""Export a trained network to ONNX, pt2 or safetensors, and check the file."""
