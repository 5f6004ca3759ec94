{# The statement of `export_sql`: rows, values, texts, cells of columns, terms, scores, probabilities, answer. #}
{% macro interval(each, value, coarse) %}
{% for start in each.starts[coarse - 1::coarse] %}WHEN {{ value }} < {{ start }} THEN {{ loop.index0 }} {% endfor %}
ELSE {{ each.starts[coarse - 1::coarse] | length }}
{%- endmacro %}
{% macro number(each, value, coarse) %}
    {% if sql.dialect == "sqlite" %}{# which may hold strings in columns of numbers, and reads them as 0 #}
    WHEN TYPEOF({{ each.plain | name }}) IN ('text', 'blob') AND {{ each.plain | name }} NOT IN ({{ each.markers }}) THEN NULL
    WHEN TYPEOF({{ each.plain | name }}) = 'text' THEN {{ each.missing // coarse }}
    {% elif sql.dialect == "bigquery" %}
    WHEN IS_NAN({{ value }}) THEN {{ each.missing // coarse }}
    {% else %}
    WHEN {{ value }} = CAST('NaN' AS {{ sql.double }}) THEN {{ each.missing // coarse }}
    {% endif %}
    WHEN {{ value }} IS NULL{% if each.codes %} OR {{ value }} IN ({{ each.codes }}){% endif %} THEN {{ each.missing // coarse }}
    {{ interval(each, value, coarse) }}
{% endmacro %}
{% macro date(each, value, coarse) %}
    WHEN {{ value }} IS NULL OR {{ value }} IN ({{ each.markers }}) THEN {{ each.missing // coarse }}
    {% if sql.dialect == "sqlite" %}{# which has no regular expressions, but functions that return NULL for no date #}
    WHEN COALESCE(DATE(SUBSTR({{ each.text }}, 1, 10), '+0 days'), '') <> SUBSTR({{ each.text }}, 1, 10) THEN NULL
    WHEN LENGTH({{ each.text }}) > 10 AND (SUBSTR({{ each.text }}, 11, 1) NOT IN ('T', ' ')
      OR SUBSTR({{ each.text }}, 12, 2) > '23' OR TIME({{ each.text }}) IS NULL) THEN NULL
    {% else %}
    WHEN NOT ({{ each.is_date }}) THEN NULL
    {% endif %}
    WHEN {{ each.text }} LIKE '0000%' THEN NULL
    {{ interval(each, "SUBSTR(" ~ each.text ~ ", 1, 10)", coarse) }}
{% endmacro %}
{% macro words(each, value, coarse) %}
    {% if each.other is none %}
    WHEN {{ value }} IS NULL OR {{ value }} IN ({{ each.markers }}) THEN {{ each.missing // coarse }}
    {% endif %}
    {% for strings, cell in each.words %}
    WHEN {{ each.text }} IN ({{ strings }}) THEN {{ cell // coarse }}
    {% endfor %}
    {% for plain, pointed, cell in each.numbers %}
    {% if plain %}
    WHEN {{ value }} IN ({{ plain }}) THEN {{ cell // coarse }}
    {% endif %}
    WHEN RTRIM({{ value }}, '0') IN ({{ pointed }}) AND {{ value }} NOT IN ('.', '-.') THEN {{ cell // coarse }}
    {% endfor %}
    {% if each.other is not none %}
    WHEN {{ value }} IS NULL OR {{ value }} IN ({{ each.markers }}) THEN {{ each.missing // coarse }}
    {% if each.numbers %}{# a number with an exponent may be one of the categories #}
    WHEN LTRIM({{ value }}, '0123456789+-.eE') = '' AND LOWER({{ value }}) LIKE '%e%'
      AND LOWER({{ value }}) NOT LIKE 'e%' THEN NULL
    {% endif %}
    ELSE {{ each.other // coarse }}
    {% endif %}
{% endmacro %}
{% set macros = {"number": number, "date": date, "words": words} %}
-- Model of quietmax {{ version }} as SQL for {{ sql.dialect }}. Its weights were released with this guarantee:
-- {{ guarantee | line }}
-- {{ guarantee.summary | line }}.
{% for sentence in guarantee.in_words("everything computed from this model") %}
-- {{ sentence | line }}
{% endfor %}
{% for assumption in guarantee.assumptions %}
-- Assumption: {{ assumption | line }}
{% endfor %}
-- Answer: {{ decision | line }}. A row with a cell that cannot be read has none.
-- Data set {{ provenance.dataset | line }}. SHA-256 of model.json: {{ provenance.model_json_sha256 }}.
-- The columns of the table, by their exact names, and their types:
{% for each in columns %}
-- {{ each.plain | line }}: {{ each.type | line }}
{% endfor %}
WITH qm_rows {{ as }} (
  SELECT {{ kept | map("name") | join(", ") }}, {{ sql.blanks }} AS qm_blanks
  FROM {{ table }}
), qm_values {{ as }} (
  SELECT qm_rows.*
  {% for each in columns %}
    {% if each.kind == "number" %}
    , CAST({{ each.plain | name }} AS {{ sql.double }}) AS qm_value_{{ loop.index0 }}
    {% else %}
    , LTRIM(RTRIM(CAST({{ each.plain | name }} AS {{ sql.text }}), qm_blanks), qm_blanks) AS qm_value_{{ loop.index0 }}
    {% endif %}
  {% endfor %}
  FROM qm_rows
), qm_texts {{ as }} (
  SELECT qm_values.*
  {% for each in columns if each.rewritten %}
    , {{ each.rewritten }} AS {{ each.text }}
  {% endfor %}
  FROM qm_values
), qm_cells {{ as }} (
  SELECT qm_texts.*
  {% for each in columns %}
    {% set place = loop.index0 %}
    {% for cell, coarse in each.cells %}
    , CASE
{{ macros[each.kind](each, "qm_value_" ~ place, coarse) }}    END AS qm_{{ cell }}_{{ place }}
    {% endfor %}
  {% endfor %}
  FROM qm_texts
), qm_terms {{ as }} (
  SELECT qm_cells.*
  {% for term in terms %}
    {% set place = loop.index0 %}
    {% for line in term.weights %}
    , CAST(CASE {{ term.cell }}{% for weight in line %} WHEN {{ loop.index0 }} THEN {{ weight | number }}{% endfor %} END AS {{ sql.double }}) AS qm_term_{{ loop.index0 }}_{{ place }}
    {% endfor %}
  {% endfor %}
  FROM qm_cells
), qm_scores {{ as }} (
  SELECT qm_terms.*
  {% for one in outputs %}
    , {% for term in terms %}{{ " + " if loop.index0 }}qm_term_{{ one }}_{{ loop.index0 }}{% endfor %} AS qm_score_{{ one }}
  {% endfor %}
  FROM qm_terms
), qm_tops {{ as }} (
  SELECT qm_scores.*, {{ "MAX" if sql.dialect == "sqlite" else "GREATEST" }}({% for one in outputs %}{{ ", " if one }}qm_score_{{ one }}{% endfor %}) AS qm_top
  FROM qm_scores
), qm_powers {{ as }} (
  SELECT qm_tops.*
  {% for one in outputs %}{# PostgreSQL refuses exponentials that round to 0 #}
    , EXP(CASE WHEN qm_score_{{ one }} - qm_top < -700 THEN -700 ELSE qm_score_{{ one }} - qm_top END) AS qm_power_{{ one }}
  {% endfor %}
  FROM qm_tops
), qm_shares {{ as }} (
  SELECT qm_powers.*
  {% for one in outputs %}
    , qm_power_{{ one }} / ({% for other in outputs %}{{ " + " if other }}qm_power_{{ other }}{% endfor %}) AS qm_share_{{ one }}
  {% endfor %}
  FROM qm_powers
), qm_answers {{ as }} (
  SELECT qm_shares.*
  {% for one in outputs %}{# what the answer is compared by: the largest is taken #}
    {% if costs and outputs | length > 2 %}
    , {% for class in outputs %} - qm_share_{{ class }} * {{ costs[class][one] | number }}{% endfor %} AS qm_rank_{{ one }}
    {% elif costs %}
    , {{ "qm_share_1" if one else threshold | number }} AS qm_rank_{{ one }}
    {% else %}
    , qm_score_{{ one }} AS qm_rank_{{ one }}
    {% endif %}
  {% endfor %}
  FROM qm_shares
)
SELECT {{ kept | map("name") | join(", ") }},
  CASE
    WHEN qm_top IS NULL THEN NULL
    {% for one in outputs[:-1] %}
    WHEN {% for other in outputs[one + 1:] %}{{ " AND " if loop.index0 }}qm_rank_{{ one }} >= qm_rank_{{ other }}{% endfor %} THEN {{ classes[one] | string }}
    {% endfor %}
    ELSE {{ classes[-1] | string }}
  END AS {{ "prediction" | name }}
  {% for class in classes %}
  , qm_share_{{ loop.index0 }} AS {{ ("probability of " ~ class) | name }}
  {% endfor %}
  {% for class in classes %}
    {% set one = loop.index0 %}
    {% for summand in summands %}
  , qm_term_{{ one }}_{{ loop.index0 }} AS {{ ("contribution of " ~ summand ~ " to " ~ class) | name }}
    {% endfor %}
  {% endfor %}
FROM qm_answers;
