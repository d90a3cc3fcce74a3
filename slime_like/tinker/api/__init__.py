"""What clients speak with: HTTP routes over protocols.Service, and the wire's formats.

app         one FastAPI app of all of it
identity    which tenant asks, and how much of it at once
bodies      JSON bodies; wire/ protobuf bodies and answers of both kinds
routes/     one file a face: clients' sessions, training, sampling, management, OpenAI's, the page
"""
