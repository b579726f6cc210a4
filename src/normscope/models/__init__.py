"""What a model is: families as data, and a model that is loaded and ready to be analysed."""
