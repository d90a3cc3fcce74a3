"""What is on the wire: bytes of strangers -> records, and answers -> bytes.

messages    protobuf messages, by their field numbers
bounds      how much of a body is read at all
tensors     arrays, dense and CSR, in protobuf and in JSON
requests    bodies of passes and samples -> LossRow, SampleJob
answers     results of calls -> protobuf or JSON
"""
