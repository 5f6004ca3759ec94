-- The tables of a ledger. The types in braces depend on the database; see database.py. Times are in microseconds since
-- 1970.
CREATE TABLE meta (
    name TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE accounts (
    id {id},
    name TEXT NOT NULL UNIQUE,
    total TEXT NOT NULL,  -- the cost that LIMIT units stand for, as JSON
    terms TEXT NOT NULL,  -- the (epsilon, delta) that the owner promised, as JSON
    limit_units BIGINT NOT NULL,
    spent_units BIGINT NOT NULL,
    sequence BIGINT NOT NULL,  -- the number and the hash of the last journal row
    head TEXT NOT NULL,
    opened BIGINT NOT NULL,
    CONSTRAINT never_overspent CHECK (0 <= spent_units AND spent_units <= limit_units)
);

CREATE TABLE training_sets (
    digest TEXT NOT NULL PRIMARY KEY,
    account BIGINT NOT NULL REFERENCES accounts (id)
);

CREATE TABLE clients (
    id {id},
    name TEXT NOT NULL UNIQUE  -- as the journal states it: a pseudonym, or the name itself of clients up to version 0.3
);

CREATE TABLE client_names (
    client BIGINT NOT NULL PRIMARY KEY REFERENCES clients (id),
    name TEXT NOT NULL UNIQUE,
    salt TEXT NOT NULL  -- the pseudonym is a hash of salt and name, so it says nothing once this row is erased
);

CREATE TABLE subaccounts (
    account BIGINT NOT NULL REFERENCES accounts (id),
    client BIGINT NOT NULL REFERENCES clients (id),
    limit_units BIGINT,
    spent_units BIGINT NOT NULL,
    refused BIGINT NOT NULL,
    PRIMARY KEY (account, client),
    CONSTRAINT quota_never_overspent
        CHECK (0 <= spent_units AND (limit_units IS NULL OR spent_units <= limit_units))
);

CREATE TABLE keys (
    id TEXT NOT NULL PRIMARY KEY,
    client BIGINT NOT NULL REFERENCES clients (id),
    role TEXT NOT NULL,
    secret_hash TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT,
    revoked BIGINT
);

-- The columns are the fields of JournalEntry, which describes them.
CREATE TABLE journal (
    account BIGINT NOT NULL REFERENCES accounts (id),
    sequence BIGINT NOT NULL,
    time BIGINT NOT NULL,
    kind TEXT NOT NULL,
    client TEXT NOT NULL,
    model TEXT NOT NULL,
    answers BIGINT NOT NULL,
    units BIGINT NOT NULL,
    spent_units BIGINT NOT NULL,
    limit_units BIGINT NOT NULL,
    detail TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (account, sequence)
);

CREATE INDEX journal_rare ON journal (account, kind) WHERE kind != 'charge';

CREATE TABLE requests (
    request {bytes} NOT NULL PRIMARY KEY,  -- a keyed hash of client and request id
    body {bytes} NOT NULL,  -- a hash of the request
    account BIGINT NOT NULL,
    units BIGINT NOT NULL,  -- what was charged for it
    time BIGINT NOT NULL,
    answer {bytes}
);

-- The answer cache. One row holds the answers that were drawn together.
CREATE TABLE answers (
    id {new_id},
    account BIGINT NOT NULL REFERENCES accounts (id),
    keys {bytes} NOT NULL,  -- keyed hashes of model version and features, 16 bytes each
    answers {bytes} NOT NULL,  -- the packed answers in the same order
    time BIGINT NOT NULL DEFAULT 0  -- 0 in rows of version 0.1
);

CREATE INDEX answers_by_account ON answers (account, id);
