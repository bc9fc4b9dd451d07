"""Models, each plain single-device Keras: build(**sizes) -> keras.Model."""
