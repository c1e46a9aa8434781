"""The parts of `data/make_demo.py`: towns, texture, canvas, street, objects, sensor, scene.

Each scene is a small three-dimensional world (metres; x to the right, y up, z ahead) seen by one pinhole camera and
painted back to front, colours and labels together. Texture is a function of the position in the world, colours overlap
between the classes (grey cars, green house fronts, red paving), and the town of `val` is not one of `train`, so that
a model must use texture, shape and context. Labels are Cityscapes *label ids*, the ignored ones included.

The pixels are the same on every machine: shapes are filled here instead of by a library, and the random numbers are
those of `RandomState`, whose streams numpy has frozen.
"""
