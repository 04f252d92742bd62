#include "jax/weights.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "fusion/weights.h"
#include "jax/frame.h"

namespace farandole {
namespace {

constexpr size_t kWords = sizeof(uint64_t) / sizeof(uint32_t);

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  std::istringstream in{std::string(text)};
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

Buffer words_of(const ffi::Values& values, int64_t i, size_t count) {
  const Buffer buffer = buffer_of(values, i);
  if (buffer.dtype != DType::uint32 || buffer.count != count)
    throw invalid_call("array " + std::to_string(i) + " is not of " + std::to_string(count) +
                       " words");
  return buffer;
}

std::vector<WeightsRow> rows_of(const ffi::Values& arguments, const std::vector<std::string>& ranks,
                                size_t parameters) {
  const Buffer table = words_of(arguments, 0, ranks.size() * parameters * kWords);
  const std::byte* at = table.data;
  std::vector<WeightsRow> rows;
  for (const std::string& rank : ranks) {
    WeightsRow row{std::stoi(rank), std::vector<uint64_t>(parameters)};
    std::memcpy(row.checksums.data(), at, parameters * sizeof(uint64_t));
    at += parameters * sizeof(uint64_t);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

void answer_checksums(const ffi::CallFrame& frame) {
  const auto count = static_cast<size_t>(frame.arguments.size);
  std::byte* to = words_of(frame.results, 0, count * kWords).data;
  for (int64_t i = 0; i < frame.arguments.size; ++i) {
    const Buffer array = buffer_of(frame.arguments, i);
    const uint64_t sum = checksum({array.data, array.bytes()});
    std::memcpy(to, &sum, sizeof sum);
    to += sizeof sum;
  }
}

std::optional<Error> answer_weights(const ffi::CallFrame& frame) {
  const std::vector<std::string> names = lines_of(text_of(frame.attributes, "names"));
  const std::vector<std::string> ranks = lines_of(text_of(frame.attributes, "ranks"));
  WeightsContext context;
  context.line = text_of(frame.attributes, "line");
  context.step = *reinterpret_cast<const uint32_t*>(words_of(frame.arguments, 1, 1).data);
  const auto period = static_cast<uint64_t>(whole_of(frame.attributes, "period"));
  if (context.step > 1) {
    const uint64_t second = std::min<uint64_t>(context.step - 1, 2);  // or the first
    context.equal_before = std::max(second, context.step - std::min(context.step, period));
  }
  std::memset(words_of(frame.results, 0, 1).data, 0, sizeof(uint32_t));
  return difference_of_weights(names, rows_of(frame.arguments, ranks, names.size()), context);
}

}  // namespace farandole
