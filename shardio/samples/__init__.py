"""The content of one sample: the clip that is drawn, its audio, its pictures, its tokens."""
