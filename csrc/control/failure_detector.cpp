#include "control/failure_detector.h"

#include <cstring>
#include <string>
#include <type_traits>

#include "base/fixed_text.h"

namespace farandole {
namespace {

// "value\x1f0,2\x1e…": each value and the ranks that gave it, in one text.
std::string join_values(const Context& where) {
  std::string text;
  for (const auto& [value, ranks] : where.values) {
    text += value + '\x1f';
    for (int r : ranks) text += std::to_string(r) + ',';
    text += '\x1e';
  }
  return text;
}

std::vector<std::pair<std::string, std::vector<int>>> split_values(std::string_view text) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  while (!text.empty()) {
    const size_t length = text.find('\x1e');
    if (length == std::string_view::npos) break;  // cut to fit: its ranks may be too
    const std::string_view item = text.substr(0, length);
    text.remove_prefix(length + 1);
    const size_t middle = item.find('\x1f');
    if (middle == std::string_view::npos) continue;
    std::vector<int> ranks;
    for (const char* at = item.data() + middle + 1; at < item.data() + item.size();) {
      char* end = nullptr;
      ranks.push_back(static_cast<int>(std::strtol(at, &end, 10)));
      if (end == at) break;
      at = end + 1;
    }
    values.emplace_back(item.substr(0, middle), std::move(ranks));
  }
  return values;
}

/// Hands each number and text of a record to `each`, with the member of Context that it stands for.
template <typename Record, typename Where, typename Each>
void with_both(Record& r, Where& c, const Each& each) {
  each(r.rank, c.rank);
  each(r.peer, c.peer);
  each(r.pid, c.pid);
  each(r.signal, c.signal);
  each(r.lane, c.lane);
  each(r.step, c.step);
  each(r.sequence, c.sequence);
  each(r.bytes_done, c.bytes_done);
  each(r.bytes_total, c.bytes_total);
  each(r.evidence, c.evidence);
  each(r.operation, c.operation);
  each(r.tensor, c.tensor);
  each(r.field, c.field);
  each(r.host, c.host);
}

}  // namespace

ErrorRecord encode(const Error& error) {
  ErrorRecord r{};
  with_both(r, error.where(), [](auto& record, const auto& where) {
    if constexpr (std::is_array_v<std::remove_reference_t<decltype(record)>>)
      copy_cut(where, record);
    else
      record = where;
  });
  r.code = static_cast<int32_t>(error.code());
  copy_cut(error.verdict(), r.verdict);
  copy_cut(error.advice(), r.advice);
  copy_cut(join_values(error.where()), r.values);
  return r;
}

Error decode(const ErrorRecord& r) {
  Context c;
  with_both(r, c, [](const auto& record, auto& where) {
    if constexpr (std::is_array_v<std::remove_reference_t<decltype(record)>>)
      where = text_in(record);
    else
      where = record;
  });
  c.values = split_values(text_in(r.values));
  const bool known = r.code >= 0 && static_cast<size_t>(r.code) < kErrors.size();
  const ErrorCode code = known ? static_cast<ErrorCode>(r.code) : ErrorCode::internal;
  return Error(code, text_in(r.verdict), std::move(c), text_in(r.advice));
}

void HostFailureDetector::report(const Error& error) {
  uint64_t alive = 0;
  const ErrorRecord record = encode(error);  // before, so that the record is soon complete
  if (!cell_.state.value.compare_exchange_strong(alive, 1)) return;  // somebody was first
  cell_.record = record;
  cell_.state.value.store(2, std::memory_order_seq_cst);  // partners: failed, verdict
  reports_made.fetch_add(1);
}

std::optional<Error> HostFailureDetector::verdict() const {
  if (cell_.state.value.load(std::memory_order_acquire) != 2) return std::nullopt;
  return decode(cell_.record);
}

}  // namespace farandole
