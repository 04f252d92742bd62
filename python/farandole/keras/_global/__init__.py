"""The parts of farandole.keras.Model."""
