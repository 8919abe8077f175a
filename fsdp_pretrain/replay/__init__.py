"""The same samples again from a checkpoint, beside the run: was a step's number the data, the state or the numerics?"""
