"The programs of the folder `examples`: `python -m dynattn.examples` lists them, `python -m dynattn.examples NAME` runs one."
