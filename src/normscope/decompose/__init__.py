"""From what a layer did to what each input token contributed: tensors in, tensors out."""
