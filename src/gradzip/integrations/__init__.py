"""gradzip inside training frameworks: one import each.

    lightning      GradzipCallback for lightning.Trainer
    transformers   GradzipCallback for transformers.Trainer
    accelerate     attach, which also saves and loads with accelerator.save_state and load_state

None of these packages is needed by gradzip or imported with it: import the module of the one that you use.
"""
