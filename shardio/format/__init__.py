"""The shard format: conversion of values to bytes and back. This package opens no files."""
