"""What farandole.keras.Model is made of."""
